"""Steps of `maxattn tune`: choose candidates, time them, keep the measurements."""
