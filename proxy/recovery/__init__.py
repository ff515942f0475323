"""What is done about a unit that stays DOWN: decided in planner.py, done by command.py or webhook.py."""
