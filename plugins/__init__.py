"""Operations inside engines: the two attention operations and their reference implementations."""
