"""How each library is called; one file a library, imported only where it is built."""
