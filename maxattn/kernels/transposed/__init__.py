"""The kernels of `tpu_flash`: attention on TPUs with keys along the sublanes."""
