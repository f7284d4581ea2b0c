"""Custom ops of convolutions and pools."""
