"""Public calls in padless's own words."""
