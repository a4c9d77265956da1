"""Text generators: each module makes histories of one style."""
