"""Where keys and values live, and the attention that reads them."""
