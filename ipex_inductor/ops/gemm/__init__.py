"""Custom ops of linear layers and other GEMMs."""
