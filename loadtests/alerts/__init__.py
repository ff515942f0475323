"""Each alert that is shipped, fired by a real fault and cleared by its end."""
