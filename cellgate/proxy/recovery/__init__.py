"""Recovery of a unit that stays DOWN: planner.py decides, command.py or webhook.py acts."""
