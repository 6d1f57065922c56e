"""What the Makefile calls. Only tools.demo needs the virtual environment."""
