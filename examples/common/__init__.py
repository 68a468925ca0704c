"""What training and sampling share: settings, processes, folders, pictures, small layers."""
