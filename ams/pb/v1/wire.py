"""The version of the wire, made by 'make proto': a hash of all messages and of the version of frames."""

WIRE = "1fc64a7e"
