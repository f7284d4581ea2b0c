"""Lower linear layers and other GEMMs."""
