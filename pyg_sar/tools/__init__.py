"""The command line, verification, and graphs to try things on."""
