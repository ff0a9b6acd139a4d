"""A converted checkpoint as an ONNX file whose norms are ``RMSNormalization``."""
