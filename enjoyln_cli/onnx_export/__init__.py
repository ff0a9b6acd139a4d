"""A checkpoint as ONNX files, in which folded norms are ``RMSNormalization``."""
