"""Generated from proto/ by scripts/generate_protos.py: the messages of the Open Inference Protocol."""
