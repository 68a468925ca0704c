"""Time functions and show what was measured: for audits and the tools."""
