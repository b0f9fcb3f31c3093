"""The web page: a Gradio page over the same jobs as the command line, and the server that guards it."""
