"""Real SGLang engines on this machine's CPU."""
