"""`padless tune`: measured costs of tiles."""
