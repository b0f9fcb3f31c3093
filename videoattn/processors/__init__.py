"""diffusers' side of the swap: attention processors for LTX models, and their installation."""
