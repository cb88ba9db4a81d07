"""Files of data in stores, read ahead of use in checked blocks, and kept on the local disk."""
