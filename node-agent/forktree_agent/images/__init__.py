"""Root file systems from registries: named by tenants, pulled, unpacked in a jail, kept within bounds."""
