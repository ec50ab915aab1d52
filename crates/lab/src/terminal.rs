//! The capabilities of the output.

use std::io::IsTerminal;

/// Width in columns if it is not known: that of traditional terminals.
const WIDTH_DEFAULT: usize = 80;

/// Least width in columns; longer lines wrap.
const WIDTH_MIN: usize = 40;

/// Largest width in columns that is still easy to read.
const WIDTH_MAX: usize = 120;

/// The way to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Width in columns.
    pub width: usize,
    /// Whether colours are used.
    pub colour: bool,
    /// Whether characters beyond ASCII can be shown.
    pub unicode: bool,
}

/// The colours used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// The subject.
    Green,
    /// The object of comparison.
    Blue,
    /// A slow result.
    Red,
    /// A remark.
    Grey,
    /// Headings.
    Bold,
}

impl Terminal {
    /// Without any of it: for files, pipes and tests.
    pub const PLAIN: Self = Self { width: WIDTH_DEFAULT, colour: false, unicode: false };

    /// The capabilities of standard output, by the environment: `NO_COLOR`
    /// (<https://no-color.org>), `TERM=dumb`, `COLUMNS`, the locale.
    #[must_use]
    pub fn of_stdout() -> Self {
        let size = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        Self::from_environment(std::io::stdout().is_terminal(), size, |name| {
            std::env::var(name).ok()
        })
    }

    fn from_environment(
        is_terminal: bool,
        size: Option<usize>,
        var: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let set = |name| var(name).filter(|value| !value.is_empty());
        let dumb = var("TERM").as_deref() == Some("dumb");
        // The first variable that is set decides (POSIX). Without any, the locale is C, but
        // containers rarely set one and their terminals support UTF-8. So only an explicit other
        // locale counts.
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG"));
        let unicode = locale.is_none_or(|locale| {
            let locale = locale.to_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        let columns = set("COLUMNS").and_then(|columns| columns.parse().ok());
        Self {
            width: columns.or(size).unwrap_or(WIDTH_DEFAULT).clamp(WIDTH_MIN, WIDTH_MAX),
            colour: is_terminal && !dumb && set("NO_COLOR").is_none(),
            unicode: unicode && !dumb,
        }
    }

    /// `text` in `colour`, or unchanged without colours.
    #[must_use]
    pub fn paint(&self, colour: Colour, text: &str) -> String {
        if !self.colour || text.is_empty() {
            return text.to_owned();
        }
        let code = match colour {
            Colour::Green => "32",
            Colour::Blue => "34",
            Colour::Red => "31",
            Colour::Grey => "90",
            Colour::Bold => "1",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// The width of a text in columns, without colours. It counts characters, since all of ours have
/// single width.
pub(crate) fn width_of(text: &str) -> usize {
    let mut width = 0;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            // An SGR sequence ends with an `m`.
            chars.by_ref().take_while(|&c| c != 'm').for_each(drop);
        } else {
            width += 1;
        }
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(is_terminal: bool, size: Option<usize>, vars: &[(&str, &str)]) -> Terminal {
        Terminal::from_environment(is_terminal, size, |name| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn colour_only_where_it_is_supported_and_allowed() {
        assert!(with(true, None, &[]).colour);
        assert!(!with(false, None, &[]).colour, "a pipe");
        assert!(!with(true, None, &[("NO_COLOR", "1")]).colour);
        assert!(with(true, None, &[("NO_COLOR", "")]).colour, "empty is unset");
        assert!(!with(true, None, &[("TERM", "dumb")]).colour);
    }

    #[test]
    fn width_is_bounded() {
        assert_eq!(with(true, None, &[]).width, 80);
        assert_eq!(with(true, Some(100), &[]).width, 100);
        assert_eq!(with(true, Some(100), &[("COLUMNS", "60")]).width, 60);
        assert_eq!(with(true, Some(100), &[("COLUMNS", "wide")]).width, 100);
        assert_eq!(with(true, Some(7), &[]).width, WIDTH_MIN);
        assert_eq!(with(true, Some(400), &[]).width, WIDTH_MAX);
    }

    #[test]
    fn ascii_where_the_locale_asks_for_it() {
        assert!(with(true, None, &[]).unicode);
        assert!(with(true, None, &[("LANG", "de_DE.UTF-8")]).unicode);
        assert!(!with(true, None, &[("LANG", "C")]).unicode);
        assert!(!with(true, None, &[("LC_ALL", "POSIX"), ("LANG", "C.utf8")]).unicode);
        assert!(!with(true, None, &[("TERM", "dumb")]).unicode);
    }

    #[test]
    fn paint_adds_no_width() {
        let colourful = Terminal { colour: true, ..Terminal::PLAIN };
        let painted = colourful.paint(Colour::Red, "sync µs");
        assert_ne!(painted, "sync µs");
        assert_eq!(width_of(&painted), 7);
        assert_eq!(Terminal::PLAIN.paint(Colour::Red, "sync"), "sync");
        assert_eq!(colourful.paint(Colour::Red, ""), "");
    }
}
