"""The APIs of what runs units: Kubernetes, Amazon ECS. Connections and refusals; no decisions."""
