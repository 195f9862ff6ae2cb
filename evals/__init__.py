"""What a change did: to the text that comes out (quality) and to the time it takes (speed)."""
