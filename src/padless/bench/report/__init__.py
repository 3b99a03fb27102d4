"""What records say, as tables (terminal and Markdown), figures, and what limits allow."""
