//! The libraries, installed into a folder, and programs that are compiled with them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use tempfile::TempDir;

/// Warnings are errors.
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// Reports what was not tested, also when the test passes: `cargo test` does not keep what is written to the descriptor.
pub(crate) fn skip(what: &str) {
    writeln!(std::io::stderr(), "capi: NOT TESTED: {what}").expect("there is a stderr");
}

/// Whether there is a compiler for C++.
pub(crate) fn has_cplusplus() -> bool {
    Command::new("c++").arg("--version").output().is_ok()
}

/// A prefix with header, libraries and pkg-config file.
pub(crate) struct Installed {
    dir: TempDir,
    /// The flags of the compiler for the shared library.
    shared: Vec<String>,
}

impl Installed {
    /// Installs once for all tests of this process.
    pub(crate) fn get() -> &'static Self {
        static INSTALLED: OnceLock<Installed> = OnceLock::new();
        INSTALLED.get_or_init(Self::install)
    }

    fn install() -> Self {
        let dir = TempDir::new().unwrap();
        // Cargo puts the libraries beside the tests of the same build.
        let test = std::env::current_exe().unwrap();
        let build = test.parent().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-c");
        let mut install = Command::new(script);
        install.arg(build).arg(dir.path()).env_remove("DESTDIR").env_remove("LIBDIR");
        succeed(&mut install);
        let (include, lib) = (dir.path().join("include"), dir.path().join("lib"));
        let by_hand =
            ["-I".to_owned() + &path(&include), "-L".to_owned() + &path(&lib), "-lriopipe".into()];
        let shared = match pkg_config(dir.path(), &["--cflags", "--libs"]) {
            Some(flags) => {
                assert_eq!(flags, by_hand, "of pkg-config");
                flags
            }
            None => {
                skip("riopipe.pc: there is no pkg-config");
                by_hand.into()
            }
        };
        Self { dir, shared }
    }

    pub(crate) fn prefix(&self) -> &Path {
        self.dir.path()
    }

    /// Runs a tool of the binutils, which come with the C compiler, on the shared library, and returns its output.
    pub(crate) fn tool(&self, tool: &str, args: &[&str]) -> String {
        succeed(Command::new(tool).args(args).arg(self.prefix().join("lib/libriopipe.so")))
    }
}

/// The flags that pkg-config has for the installed library; `None` if there is no pkg-config.
fn pkg_config(prefix: &Path, args: &[&str]) -> Option<Vec<String>> {
    Command::new("pkg-config").arg("--version").output().ok()?;
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(args).arg("riopipe");
    let version = Command::new("pkg-config")
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .args(["--modversion", "riopipe"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&version.stdout).trim(), env!("CARGO_PKG_VERSION"));
    Some(succeed(&mut command).split_whitespace().map(str::to_owned).collect())
}

fn path(path: &Path) -> String {
    path.to_str().expect("temporary folders have readable names").to_owned()
}

/// Runs a command to its success, and returns what it prints.
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// A way to compile and run programs.
#[derive(Debug)]
pub(crate) struct Build {
    name: &'static str,
    /// The flags of the compiler before the source and behind it.
    before: Vec<String>,
    behind: Vec<String>,
    /// The words before the program.
    wrapper: Vec<String>,
    prefix: PathBuf,
}

impl Build {
    pub(crate) fn shared(installed: &Installed) -> Self {
        let mut behind = installed.shared.clone();
        behind.push(format!("-Wl,-rpath,{}", path(&installed.prefix().join("lib"))));
        Self {
            name: "shared",
            before: vec!["-g".into()],
            behind,
            wrapper: Vec::new(),
            prefix: installed.prefix().to_owned(),
        }
    }

    /// With `libriopipe.a`, and the libraries that its pkg-config file names.
    pub(crate) fn with_static_library(installed: &Installed) -> Self {
        let pc =
            std::fs::read_to_string(installed.prefix().join("lib/pkgconfig/riopipe.pc")).unwrap();
        let private = pc.lines().find_map(|line| line.strip_prefix("Libs.private: "));
        let private = private.expect("the file names them").split_whitespace();
        let mut behind = vec![
            format!("-I{}", path(&installed.prefix().join("include"))),
            path(&installed.prefix().join("lib/libriopipe.a")),
        ];
        behind.extend(private.map(str::to_owned));
        Self { name: "static", behind, ..Self::shared(installed) }
    }

    /// With AddressSanitizer and UBSan, or why this machine has none.
    pub(crate) fn sanitized(installed: &Installed) -> Result<Self, String> {
        let before = [
            "-g",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-fno-omit-frame-pointer",
        ];
        let mut build = Self {
            name: "sanitized",
            before: before.map(str::to_owned).into(),
            ..Self::shared(installed)
        };
        let trial = installed.prefix().join("trial.c");
        std::fs::write(&trial, "int main(void) { return 0; }\n").unwrap();
        let program = installed.prefix().join(format!("trial-{:?}", std::thread::current().id()));
        let mut cc = Command::new("cc");
        let compiled = cc.args(&build.before).arg("-o").arg(&program).arg(&trial).output();
        if !compiled.expect("there is a C compiler").status.success() {
            return Err("the compiler has none".into());
        }
        // Old sanitizers do not run with the random addresses of new kernels.
        for wrapper in [&["setarch", "-R"][..], &[]] {
            build.wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
            let ran = build.wrapped(&program).output();
            if ran.is_ok_and(|output| output.status.success()) {
                return Ok(build);
            }
        }
        Err("a program that does nothing does not run with them here".into())
    }

    fn wrapped(&self, program: &Path) -> Command {
        match self.wrapper.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            None => Command::new(program),
        }
    }

    /// A command that runs a program of `tests/c`, which is compiled if it was not before.
    pub(crate) fn command(&self, program: &str) -> Command {
        static COMPILING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = COMPILING.lock().unwrap_or_else(|error| error.into_inner());
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
        let is_cplusplus = program == "cplusplus";
        let (compiler, standard, extension) =
            if is_cplusplus { ("c++", "-std=c++17", "cpp") } else { ("cc", "-std=gnu11", "c") };
        let binary = self.prefix.join(format!("{}-{program}", self.name));
        if !binary.exists() {
            let mut command = Command::new(compiler);
            command.arg(standard).args(WARNINGS).arg("-pthread").args(&self.before);
            command.arg("-o").arg(&binary).arg(sources.join(format!("{program}.{extension}")));
            command.args(&self.behind);
            succeed(&mut command);
        }
        self.wrapped(&binary)
    }
}
