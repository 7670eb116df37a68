//! How system calls that move bytes report.

use std::io;

/// Call until it is not interrupted by a signal; the count that it returned, or the error it left in errno.
pub fn count(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_is_the_error_it_left() {
        // SAFETY: No such descriptor, and nothing to be read.
        let outcome = count(|| unsafe { libc::read(-1, std::ptr::null_mut(), 0) });
        assert_eq!(outcome.expect_err("closed").raw_os_error(), Some(libc::EBADF));
    }
}
