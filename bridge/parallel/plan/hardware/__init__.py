"""What training runs on: rates of devices and links, measured or of published figures."""
