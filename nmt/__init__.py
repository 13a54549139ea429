"""nmt: recurrent, attention-based machine translation, end to end."""
