"""Attention on TPUs with keys along the sublanes: what `tpu_flash` is made of."""
