"""Time functions on a device and format the times, for audits and the tools."""
