"""Take measurements that need hours or a special set-up; not part of `make bench`."""
