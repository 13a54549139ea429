"""A statistical aligner of words, trained on the very text that it aligns."""
