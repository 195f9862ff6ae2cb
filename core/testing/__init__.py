"""What tests of the engine and of third-party plugins share."""
