"""Write the rows of users' Spark queries to a lake table."""
