"""Where cells and units come from beside the configuration: one file for each source."""
