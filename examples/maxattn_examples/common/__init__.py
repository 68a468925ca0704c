"""What training and sampling share: settings, processes, folders, pictures, small layers."""

from .requirements import say_what_is_missing

say_what_is_missing()
