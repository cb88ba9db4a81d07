"""Speak S3 through boto3 or ibm-cos-sdk: requests, replies, errors, options."""
