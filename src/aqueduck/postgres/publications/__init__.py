"""Publications and slots: what the server sends, and who owns them."""
