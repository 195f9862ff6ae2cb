"""How spans of the decoder's nodes are computed."""
