"""What `maxattn tune` does: choose candidates, time them, keep what was measured."""
