"""The tests, in the folders of src/understudy."""
