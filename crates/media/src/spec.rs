//! The specifications that name media, on one line: `kind:what[,option=value…]`.
//!
//! The caller takes the options that it knows out of a parsed `Spec`, one by one. At the end,
//! `Spec::finish` refuses the options that are left.

use riopipe_order::block_device::BLOCK_BYTES;

use crate::error::OpenError;

/// A parsed specification.
#[derive(Debug)]
pub(crate) struct Spec<'a> {
    text: &'a str,
    help: &'static str,
    /// The text before the colon.
    pub(crate) kind: &'a str,
    /// The text between the colon and the first comma.
    pub(crate) what: &'a str,
    /// The options that the caller has not taken yet.
    options: Vec<SpecOption<'a>>,
}

/// An option of a specification. The value is empty if the text has no `=`.
#[derive(Debug)]
struct SpecOption<'a> {
    name: &'a str,
    value: &'a str,
}

impl<'a> Spec<'a> {
    /// Parses `text`; `help` is part of each error.
    pub(crate) fn parse(text: &'a str, help: &'static str) -> Result<Spec<'a>, OpenError> {
        let mut spec = Spec { text, help, kind: "", what: "", options: Vec::new() };
        let Some((kind, rest)) = text.split_once(':') else {
            return Err(spec.error("no kind: a medium is written as kind:what[,option=value]"));
        };
        spec.kind = kind;
        let mut parts = rest.split(',');
        // `split` yields at least one part.
        spec.what = parts.next().unwrap_or_default();
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            if spec.options.iter().any(|option| option.name == name) {
                return Err(spec.error(format!("option {name:?} is given twice")));
            }
            spec.options.push(SpecOption { name, value });
        }
        Ok(spec)
    }

    /// Removes option `name` and returns its value, which is empty if none is given.
    pub(crate) fn option(&mut self, name: &str) -> Option<&'a str> {
        let index = self.options.iter().position(|option| option.name == name)?;
        Some(self.options.remove(index).value)
    }

    /// Removes a switch, which is an option without a value. Returns whether the switch is given.
    pub(crate) fn switch(&mut self, name: &str) -> Result<bool, OpenError> {
        match self.option(name) {
            None => Ok(false),
            Some("") => Ok(true),
            Some(value) => {
                Err(self.error(format!("option {name:?} takes no value, not {value:?}")))
            }
        }
    }

    /// Removes an option whose value is a size. Returns the size in bytes, which is a whole number
    /// of blocks.
    pub(crate) fn size(&mut self, name: &str) -> Result<Option<u64>, OpenError> {
        match self.option(name) {
            None => Ok(None),
            Some(text) => self.block_aligned_size(text).map(Some),
        }
    }

    /// The text before the options as a path, which must not be empty.
    pub(crate) fn path(&self) -> Result<&'a str, OpenError> {
        match self.what {
            "" => Err(self.error(format!("no path: write {}:/path/to/it", self.kind))),
            path => Ok(path),
        }
    }

    /// Parses `text` as a size, and returns it in bytes. It must be positive, and a whole number of
    /// blocks.
    pub(crate) fn block_aligned_size(&self, text: &str) -> Result<u64, OpenError> {
        let bytes = parse_size(text).map_err(|problem| self.error(problem))?;
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(
                self.error(format!("size {text:?} is not a positive multiple of 4096 bytes"))
            );
        }
        Ok(bytes)
    }

    /// Checks that all options have been removed.
    pub(crate) fn finish(&self) -> Result<(), OpenError> {
        match self.options.first() {
            None => Ok(()),
            Some(SpecOption { name, .. }) => {
                Err(self.error(format!("unknown option {name:?} for {:?}", self.kind)))
            }
        }
    }

    /// An error about this specification.
    pub(crate) fn error(&self, problem: impl Into<String>) -> OpenError {
        OpenError::Spec { spec: self.text.to_owned(), problem: problem.into(), help: self.help }
    }
}

/// Parses a size in bytes: a number, optionally with a suffix K, M, G or T (powers of 1024; KiB, KB
/// and k mean the same).
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let shift = match suffix.to_ascii_lowercase().trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("{text:?} is not a size: write for example 64M or 1G")),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(|| format!("{text:?} is not a size: write for example 64M or 1G"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64K", 65536),
            ("2M", 2 << 20),
            ("1GiB", 1 << 30),
            ("1g", 1 << 30),
            ("3TB", 3 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "1X", "-1", "1.5G", "99999999999T", "9223372036854775808"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn unknown_and_repeated_options_are_refused() {
        let mut spec = Spec::parse("file:/a b,size=1M,sparse", "help").unwrap();
        assert_eq!((spec.kind, spec.what), ("file", "/a b"));
        assert!(spec.finish().is_err());
        assert_eq!(spec.size("size").unwrap(), Some(1 << 20));
        assert!(spec.switch("sparse").unwrap());
        assert!(!spec.switch("sparse").unwrap());
        spec.finish().unwrap();
        for text in ["file", "x:y,a=1,a=2"] {
            assert!(Spec::parse(text, "help").is_err(), "{text}");
        }
        let mut spec = Spec::parse("mem:5000,a=1", "help").unwrap();
        assert!(spec.block_aligned_size("5000").is_err());
        assert!(spec.block_aligned_size("0").is_err());
        assert!(spec.switch("a").is_err());
    }
}
