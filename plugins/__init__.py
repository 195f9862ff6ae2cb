"""The offers that ship with outweigh: a folder a seam, a file an offer."""
