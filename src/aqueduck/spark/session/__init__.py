"""The Spark session: Java, authentication, scratch space, and the daemons of its Python workers."""
