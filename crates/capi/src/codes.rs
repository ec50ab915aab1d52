//! The codes that functions return. A code keeps its number and its meaning; new ones are added at the end.

use std::ffi::{c_char, c_int};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        $($(#[$doc])* pub const $name: c_int = $number;)*

        /// The name of each code.
        const NAMES: &[(c_int, &std::ffi::CStr)] = &[$((
            $name,
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no zero byte"),
            },
        )),*];
    };
}

codes! {
    /// Success.
    RIOP_OK = 0;
    /// An error for which this version has no code.
    RIOP_OTHER = 1;
    /// An argument is null, or invalid in itself.
    RIOP_ARGUMENT = 2;
    /// A pointer is not to an object of the expected kind.
    RIOP_HANDLE = 3;
    /// Another thread is using the object.
    RIOP_BUSY = 4;
    /// The library has an error: a panic was caught. The object can only be freed.
    RIOP_PANIC = 5;
    /// A text is not the address of a member.
    RIOP_ADDRESS = 6;
    /// An option is invalid, or unknown to this version.
    RIOP_OPTION = 7;
    /// There is no such namespace, stream or volume.
    RIOP_NOT_FOUND = 8;
    /// A target can't be reached, or does not answer.
    RIOP_UNREACHABLE = 9;
    /// A target answers, and is not one that can be used.
    RIOP_PROTOCOL = 10;
    /// A target refused a request.
    RIOP_REFUSED = 11;
    /// This process has no memory, descriptors or threads left.
    RIOP_RESOURCES = 12;
    /// The members do not make this volume.
    RIOP_MEMBERS = 13;
    /// A drive is in use, or is no drive for a volume.
    RIOP_DRIVE = 14;
    /// The volume has an owner.
    RIOP_OWNED = 15;
    /// An ordering log is lost, damaged, too small, or not the one that is due.
    RIOP_LOG = 16;
    /// The engine can't run here.
    RIOP_ENGINE = 17;
    /// The recovery failed.
    RIOP_RECOVERY = 18;
    /// Updates in place must be acknowledged first.
    RIOP_PENDING = 19;
    /// There is nothing to acknowledge.
    RIOP_NOT_PENDING = 20;
    /// The stream is open already.
    RIOP_STREAM_OPEN = 21;
    /// Streams of the volume are still open.
    RIOP_STREAMS_OPEN = 22;
    /// There is no space for the group now.
    RIOP_FULL = 23;
    /// The group, or the buffer, can never fit.
    RIOP_TOO_LARGE = 24;
    /// The group has no writes, and is not durable.
    RIOP_EMPTY = 25;
    /// Blocks do not lie within the volume, or bytes are no whole blocks.
    RIOP_RANGE = 26;
    /// The stream that is to follow the group can't follow it.
    RIOP_FOLLOWER = 27;
    /// The group violates a duty of the caller.
    RIOP_VIOLATION = 28;
    /// The stream has failed.
    RIOP_FAILED = 29;
    /// The stream has not failed.
    RIOP_HEALTHY = 30;
    /// The time limit has passed.
    RIOP_TIMEOUT = 31;
    /// Another thread has interrupted the wait.
    RIOP_WOKEN = 32;
    /// The group has not been submitted.
    RIOP_NOT_SUBMITTED = 33;
    /// The stream or the volume was closed, or was freed.
    RIOP_CLOSED = 34;
    /// A drive failed to read.
    RIOP_READ = 35;
    /// The read was cancelled.
    RIOP_CANCELLED = 36;
    /// A target and this host did not authenticate.
    RIOP_AUTHENTICATION = 37;
}

/// All codes with their names, for bindings of other languages.
pub fn code_names() -> impl Iterator<Item = (c_int, &'static str)> {
    NAMES.iter().map(|(code, name)| (*code, name.to_str().expect("the names are ASCII")))
}

/// The name of a code, such as `"RIOP_FULL"`; `"RIOP_?"` for a number that is no code. It is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn riop_code_name(code: c_int) -> *const c_char {
    let known = NAMES.iter().find(|(number, _)| *number == code);
    known.map_or(c"RIOP_?", |(_, name)| name).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn numbers_are_used_once_and_have_names() {
        for (index, (number, name)) in NAMES.iter().enumerate() {
            assert_eq!(usize::try_from(*number), Ok(index), "{name:?}");
        }
        // SAFETY: the function returns a text that ends with a zero byte.
        let name = |code| unsafe { CStr::from_ptr(riop_code_name(code)) };
        assert_eq!(name(RIOP_FULL), c"RIOP_FULL");
        assert_eq!((name(-1), name(1000)), (c"RIOP_?", c"RIOP_?"));
    }
}
