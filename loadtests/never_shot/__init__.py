"""What looks like trouble and is none."""
