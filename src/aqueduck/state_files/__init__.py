"""The small files by which the processes of one service talk: replaced as a whole, one writer each."""
