"""Training of the demo model: text encoder, video autoencoder, transformer, in this order."""
