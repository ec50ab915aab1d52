//! The specifications that name media, on one line: `kind:what[,option=value…]`. A comma that
//! belongs to a path is written twice.
//!
//! The caller takes the options that it knows out of a parsed `Spec`, one by one. At the end,
//! `Spec::finish` refuses the options that are left.

use std::borrow::Cow;

use riopipe_order::block_device::BLOCK_BYTES;

use crate::error::OpenError;

/// A parsed specification.
#[derive(Debug)]
pub(crate) struct Spec<'a> {
    text: &'a str,
    help: &'static str,
    /// The text before the colon.
    pub(crate) kind: &'a str,
    /// The text between the colon and the first option.
    pub(crate) what: Cow<'a, str>,
    /// The options that the caller has not taken yet.
    options: Vec<SpecOption<'a>>,
}

/// An option of a specification. The value is empty if the text has no `=`.
#[derive(Debug)]
struct SpecOption<'a> {
    name: Cow<'a, str>,
    value: Cow<'a, str>,
}

impl<'a> Spec<'a> {
    /// Parses `text`; `help` is part of each error.
    pub(crate) fn parse(text: &'a str, help: &'static str) -> Result<Spec<'a>, OpenError> {
        let mut spec = Spec { text, help, kind: "", what: "".into(), options: Vec::new() };
        let Some((kind, rest)) = text.split_once(':') else {
            return Err(spec.error("no kind: a medium is written as kind:what[,option=value]"));
        };
        spec.kind = kind;
        let mut parts = split(rest).into_iter();
        // `split` yields at least one part.
        spec.what = parts.next().unwrap_or_default();
        for part in parts {
            let (name, value) = split_option(part);
            if spec.options.iter().any(|option| option.name == name) {
                return Err(spec.error(format!("option {name:?} is given twice")));
            }
            spec.options.push(SpecOption { name, value });
        }
        Ok(spec)
    }

    /// Removes option `name` and returns its value, which is empty if none is given.
    pub(crate) fn option(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let index = self.options.iter().position(|option| option.name == name)?;
        Some(self.options.remove(index).value)
    }

    /// Removes a switch, which is an option without a value. Returns whether the switch is given.
    pub(crate) fn switch(&mut self, name: &str) -> Result<bool, OpenError> {
        match self.option(name).as_deref() {
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
            Some(text) => self.block_aligned_size(&text).map(Some),
        }
    }

    /// The text before the options as a path, which must not be empty.
    pub(crate) fn path(&self) -> Result<Cow<'a, str>, OpenError> {
        match self.what.is_empty() {
            true => Err(self.error(format!("no path: write {}:/path/to/it", self.kind))),
            false => Ok(self.what.clone()),
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
            Some(SpecOption { name, value }) => {
                // Only the first part of a path that was meant to go on can be quoted safely.
                let advice = match value.is_empty() && matches!(self.kind, "file" | "dax" | "block")
                {
                    true => format!(
                        "; a comma in the path is written twice: {}:{},,{name}",
                        self.kind,
                        escape_commas(&self.what)
                    ),
                    false => String::new(),
                };
                Err(self.error(format!("unknown option {name:?} for {:?}{advice}", self.kind)))
            }
        }
    }

    /// An error about this specification.
    pub(crate) fn error(&self, problem: impl Into<String>) -> OpenError {
        OpenError::Spec { spec: self.text.to_owned(), problem: problem.into(), help: self.help }
    }
}

/// Cuts `text` at its single commas. Of two commas in a row, one is left.
fn split(text: &str) -> Vec<Cow<'_, str>> {
    let mut parts = Vec::new();
    let mut rest = text;
    let mut part: Cow<'_, str> = "".into();
    loop {
        let (head, tail) = rest.split_once(',').map_or((rest, None), |(h, t)| (h, Some(t)));
        part += head;
        match tail {
            Some(tail) if tail.starts_with(',') => {
                part += ",";
                rest = &tail[1..];
            }
            Some(tail) => {
                parts.push(std::mem::take(&mut part));
                rest = tail;
            }
            None => {
                parts.push(part);
                return parts;
            }
        }
    }
}

/// The name and the value of an option. The value is empty if there is no `=`.
fn split_option(part: Cow<'_, str>) -> (Cow<'_, str>, Cow<'_, str>) {
    match part {
        Cow::Borrowed(part) => {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (name.into(), value.into())
        }
        Cow::Owned(part) => {
            let (name, value) = part.split_once('=').unwrap_or((&part, ""));
            (name.to_owned().into(), value.to_owned().into())
        }
    }
}

/// A path as a specification has it: each comma is written twice.
#[must_use]
pub fn escape_commas(path: &str) -> Cow<'_, str> {
    match path.contains(',') {
        true => path.replace(',', ",,").into(),
        false => path.into(),
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
    fn a_comma_that_is_written_twice_is_part_of_a_path() {
        for (text, what, value) in [
            ("file:/a,,b,x=1", "/a,b", "1"),
            ("file:/a,,,x=1", "/a,", "1"),
            ("file:,,,,,x=,,1,,", ",,", ",1,"),
            ("file:/a,x=b,,c", "/a", "b,c"),
        ] {
            let mut spec = Spec::parse(text, "help").unwrap();
            assert_eq!(spec.what, what, "{text}");
            assert_eq!(spec.option("x").as_deref(), Some(value), "{text}");
            spec.finish().unwrap();
        }
        let path = "/a,b,,c";
        let text = format!("file:{}", escape_commas(path));
        assert_eq!(Spec::parse(&text, "help").unwrap().what, path);
        let error = Spec::parse("file:/a,b", "help").unwrap().finish().unwrap_err().to_string();
        assert!(error.contains("written twice: file:/a,,b"), "{error}");
    }

    #[test]
    fn unknown_and_repeated_options_are_refused() {
        let mut spec = Spec::parse("file:/a b,size=1M,sparse", "help").unwrap();
        assert_eq!((spec.kind, &*spec.what), ("file", "/a b"));
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
