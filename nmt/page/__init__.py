"""A web page that translates: one HTML file with the model, the tokenizer and a search in JavaScript."""
